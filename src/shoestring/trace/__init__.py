"""Model + batch + loss → a frozen graph of operations, captured on fake tensors."""
