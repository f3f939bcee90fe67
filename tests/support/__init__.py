"""What tests of several rooms share: a real S3 server, a misbehaving network before it, tiny corpora and job files."""
