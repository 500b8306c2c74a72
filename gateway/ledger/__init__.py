"""Every open request, from its submission to its last token, whatever fails behind the gateway."""
