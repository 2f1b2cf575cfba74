"""What a training state is made of: each kind of object, how it is saved and how it comes back."""
