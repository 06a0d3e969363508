"""Why a rank is late: its samples beside those of a rank that is alike."""
