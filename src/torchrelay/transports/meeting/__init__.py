"""How the ranks of a group find each other and talk: identities, connections, matching."""
