"""What two processes of one machine need to read each other's memory."""
