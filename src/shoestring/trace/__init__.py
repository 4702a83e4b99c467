"""Model + batch + loss → a frozen graph of operations, traced on fake tensors."""
