"""Worker's side of the parameter server: keys, requests, connections to servers."""
