"""Miles environment `reasoning-gym`: procedural reasoning tasks with the verifiers that come with them."""
