"""The agent: one a node. Holds the ranks that live there, tells train what happens to them, and speaks to the services
on their behalf. No torch here: ranks import it, in processes of their own.
"""
