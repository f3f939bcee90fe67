"""Models in plain torch: the built-in decoder, the protocol that a user's own model implements, Hugging Face mapping
both ways. The package itself, `args` and `hugging_face` import no torch.
"""
