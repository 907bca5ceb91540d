"""`rgp demo`: what private training costs, shown on one small network. Trains, attacks and reports."""
