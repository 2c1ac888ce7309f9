"""One call: from arrays to the kernel that was planned for them.

entry       calls as they come in, at once or by the operators; entry_varlen and entry_paged have other forms
like_torch  those of torch's own signature; nested has nested tensors
options     what a call says beside its arrays; per_head and scales read sinks, slopes and the scales of a cache
describe    the problem that a call is, and what makes no sense of it; finite looks for NaN and what overflows
attend      calls of dense operands; launch is what those with equal facts come to, run has the less plain of them
headwise    calls with sinks or slopes; varlen those of sequences one after another, paged those of a cache in pages
forms       what these three have in common: who is chosen, results and gradients
alike       those among them that are like one before go straight to its kernel
backward    gradients for callers without autograd; autograd has them of torch's, sinks those of sinks
operators   calls as torch's operators, for graphs; composed has sinks there, transforms torch.func, sharded DTensors
merge       parts over disjoint keys to the whole
measuring   what is timed on first sight; recording notes the problems that an application makes
seeds       a seed for dropout where there is none; torch_modes what of torch's state a call depends on
"""
