"""What the network between ranks gives: collectives over the axes of a mesh, every pair of ranks, and what is slow
among them (`phalanx doctor --nproc`). No torch at import.
"""
