"""The dashboard: pages for operators, and for trainers the pages of their own episodes."""
