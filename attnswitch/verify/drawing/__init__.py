"""What to try: cases, where their choices come from, and the recipe's numbers.

case        one problem and the recipe for its data     strategies  what Hypothesis draws
data        the recipe's numbers, from a hash           provider    where its choices come from
within      sizes within a regime of a backend          lattice     fixed cases: tile edges, great lengths
dims        head dimensions by class                    placings    ways to lie in memory, by name
features    the features of a case, one by one          choices     one choice after another, of Hypothesis or a seed
"""
