"""What a run demands of backends beside right results: a precision, and problems that they have to take.

precision  levels, and the stricter of a level and what a backend declares
"""
