"""What a run demands of backends beside right results: a precision, and problems that they have to take.

precision    levels, and the stricter of a level and what a backend declares
words        features that a requirement may name      limits    bounds of sizes, such as D<=128
requirement  problems that have to be taken            profiles  requirements under a name
definitions  of FlashInfer-Bench (flashinfer_bench) and KernelBench (kernelbench), read as requirements
steering     cases within a requirement, of which draws makes one, with its sizes
figures      how many of them were taken
"""
