"""The Protocols of every kind and place. One file per seam; `weights.py` and `learning.py` hold small records too."""
