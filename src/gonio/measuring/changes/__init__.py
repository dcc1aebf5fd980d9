"""What training changed between a base and one or more models: figures, findings and agreement of the changes."""
