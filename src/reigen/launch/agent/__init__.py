"""The agent that a launcher gets onto another host, where it starts and watches ranks; and the launcher's end of it."""
