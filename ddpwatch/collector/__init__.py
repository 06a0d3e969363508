"""The collector process: ingest, retain, publish, sample devices, record. One per job, spawned by rank 0."""
