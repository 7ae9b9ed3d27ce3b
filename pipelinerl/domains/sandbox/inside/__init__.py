"""Scripts that run inside the sandbox with the standard library only. The framework never imports them."""
