"""The rank's loop: preflight, one step after another, checkpoints, evaluation; what it needs from outside it asks of
one `Control`.
"""
