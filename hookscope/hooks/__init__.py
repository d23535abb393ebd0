"""Forward and gradient hooks on a network's layers; no other code registers hooks."""
