"""The modelling code that goes with a dReLU checkpoint, in the convention of upstream's Bamboo models."""
