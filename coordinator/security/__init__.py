"""Who may call and how much, what is encrypted and with which certificates, whose word about addresses counts."""
