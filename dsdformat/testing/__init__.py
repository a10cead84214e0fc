"""What a project that implements or embeds the format can test itself with."""
