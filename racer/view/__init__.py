"""What people look at: pictures and replays."""
