"""What `import specsim` offers, one function per question; the commands are thin skins over it."""
