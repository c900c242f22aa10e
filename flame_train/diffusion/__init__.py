"""What diffusion models are trained and sampled with: noise schedules, objectives and samplers."""
