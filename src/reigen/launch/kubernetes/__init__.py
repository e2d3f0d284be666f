"""Jobs on Kubernetes: nodes of Indexed Jobs and their relatives, manifests, and their submission by kubectl."""
