"""The services of one machine as one thing: a home folder with certificates, tokens and configurations, and the
supervisor that keeps the processes alive. What `phalanx up`, `down` and `status` are made of.
"""
