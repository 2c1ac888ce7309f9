"""What is right: the float64 answer in two independent forms, and how far rounding can take a right kernel from it.

oracle      the answer, dense       rows    the same row by row, without any of oracle's code
exact       an answer to judge by: dense, or of sampled rows where a case is too long for that
bounds      the running error bound of every element
"""
