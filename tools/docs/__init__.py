"""Writes the generated parts of the documentation: module pages, keyword index, section map."""
