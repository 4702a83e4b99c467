"""What a real step took, tensor by tensor."""
