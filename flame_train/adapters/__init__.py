"""Small trainable additions to frozen networks, and where they attach."""
