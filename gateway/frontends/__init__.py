"""What trainers and operators talk to: one frontend for each protocol."""
