"""Who is late beyond noise, since when, how often, and why."""
