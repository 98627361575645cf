"""What operators see of the coordinator: metrics and logs. No prompt, output or credential passes through here."""
