"""What every viewer shares: where frames come from, all that is known of a run, plain lines, `ddpwatch record`."""
