"""What recipes share: data and model, a run's folder, log, signals, metrics and results."""
