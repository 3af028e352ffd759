"""One module or package a dialect, each a `Front`."""
