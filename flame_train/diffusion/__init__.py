"""Training and sampling of diffusion models: noise schedules, objectives and samplers."""
