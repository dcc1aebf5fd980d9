"""Rules that turn figures into findings, advice on normalisation and training, and suppression."""
