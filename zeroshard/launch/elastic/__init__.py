"""Jobs whose nodes may come and go: who is in, what happens when one is lost, and where its ranks wait meanwhile."""
