"""What reads checkpoints beside the ranks: export to Hugging Face, and the reports behind `phalanx checkpoint`."""
