"""What computes: devices, the contract of a backend, the table of backends, what they are known to get wrong.

device          what a machine is, as a value; fleet has what many machines can run
backend         the contract between the dispatcher and a backend
inputs          the arrays of one call, as kernels are given them and give them back
registry        the table of backends, and those of other packages
divergences     what backends take and are known to get wrong
one_by_one      which forms a backend takes, and sequences by a kernel each where not at once; pages gathers their keys
trees           the bits of a tree of queries as a mask
differentiated  gradients by torch's autograd, for kernels whose output it differentiates
builds          kernels compiled side by side
"""
