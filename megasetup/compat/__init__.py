"""What exists only because of another library's version: each file names the versions and does nothing on others."""
