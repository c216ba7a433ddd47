"""Models for which the equation is exact or nearly so."""
