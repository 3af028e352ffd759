"""Token-in continuation: engines are sent exact ids instead of histories to render anew."""
