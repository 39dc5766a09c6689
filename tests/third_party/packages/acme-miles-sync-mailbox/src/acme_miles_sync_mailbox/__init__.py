"""Transport mailbox: copies wait in a mailbox of the process until engines swap them in."""
