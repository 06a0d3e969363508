from ddpwatch.export.library import open_recording as open_recording
