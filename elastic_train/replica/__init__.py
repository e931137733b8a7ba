"""One replica: the processes that hold one copy of the model, and what they train on.

torchtitan is known here alone.
"""
