"""Private training inside other frameworks. Each file needs its framework; `import rgp` needs none of them."""
