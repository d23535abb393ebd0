"""Forward hooks and gradient hooks: nothing else registers any."""
